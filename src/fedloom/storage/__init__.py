"""Files that are complete or not there, and trees of tensors in them."""
