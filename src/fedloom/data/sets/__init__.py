"""One file per data set. A `Dataset` that is defined in a file of this folder is registered."""
