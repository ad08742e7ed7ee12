"""Launchers: where the processes of a sweep run."""
