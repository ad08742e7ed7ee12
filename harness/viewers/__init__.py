"""Viewers of results: a static site and MLflow.

site/     `results/site/index.html`, readable without a server
mlflow/   an MLflow experiment per sweep, rebuilt from the result files
"""
