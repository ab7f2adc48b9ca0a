"""A user's own data: layouts are recognised, files are read, and whatever is wrong with them is said in a sentence."""
