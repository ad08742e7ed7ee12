"""What the commands of `lowbit` do."""
