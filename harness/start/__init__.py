"""What a run begins from: its base model and every part's offline preparation."""
