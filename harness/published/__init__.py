"""Published papers against our results: claims with badges, their figures drawn again, and their recipes to launch.

claims/    `claims.yaml` tested on our results
recipes/   `sweeps/papers/*.yaml` as sweeps, their twins, and their numbers beside ours
figures/   figures of the papers, from our results
mismatch/  mismatch of our stand-ins beside published values
"""
