"""One update as pure functions of tensors: advantages, the policy loss and the mismatch metrics."""
