"""Viewers of results: a static site, MLflow and Weights & Biases.

site/         `results/site/index.html`, readable without a server
tracking/     what a tracker of experiments is, and the thread that logs while a sweep runs
mlflow/       an MLflow experiment per sweep, rebuilt from the result files
wandb/        a W&B run per cell, offline unless asked otherwise
trackers.py   the trackers by name
"""
