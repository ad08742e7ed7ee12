"""Results elsewhere: the static site and MLflow."""
