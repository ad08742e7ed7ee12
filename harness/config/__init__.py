"""Words to a runnable method: the configuration tree, Hydra, resolved defaults, composed parts, refused conflicts."""
