"""Papers against us: claims with badges, and the papers' figures from our results."""
