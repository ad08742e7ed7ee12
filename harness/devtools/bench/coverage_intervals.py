"""The intervals whose coverage is simulated, and what tables and figure call them."""

INTERVALS = {
    "mean": "bootstrap of the mean, seeds and questions",
    "iqm": "bootstrap of the IQM, seeds and questions",
    "paired": "paired t over seeds, these questions",
    "crossed": "seeds and questions crossed",
    "paired_new": "control: paired t over seeds, held against new questions",
    "improvement": "P(X > Y), score interval",
    "improvement_two": "P(X > Y), score interval, two settings",
    "improvement_bootstrap": "control: P(X > Y), percentile bootstrap",
    "profile": "performance profile, band over all thresholds",
}
