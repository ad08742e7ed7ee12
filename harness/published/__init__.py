"""Published papers against our results: claims with badges, and their figures drawn again.

claims/    `claims.yaml` tested on our results
figures/   figures of the papers, from our results
"""
