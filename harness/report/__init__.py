"""Any sweep, shown: leaderboard, verdict tables, sentences and figures."""
