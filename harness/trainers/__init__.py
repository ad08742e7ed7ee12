"""Trainers: who holds the weights and takes the optimizer steps."""
