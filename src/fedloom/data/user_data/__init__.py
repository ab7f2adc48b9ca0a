"""Reading a user's data (the data set `own`): detect the layout of the files, read them, report what is wrong."""
