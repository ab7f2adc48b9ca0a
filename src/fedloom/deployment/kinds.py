"""Kinds of messages between a server and its sites."""

HELLO, OFFER = "hello", "offer"  # what a run is about; what the site has for it
AGREE, COUNTED = "agree", "counted"  # of runs on own data: how samples are encoded; sample counts and moments
SETUP, READY = "setup", "ready"  # a run's configuration and constants; the site has prepared it
ORDER, REPLY = "order", "reply"  # train or evaluate in a round; uploads and scores
END, DONE = "end", "done"  # the run is over, and which round was the best
FAILURE = "failure"  # in place of any answer: why there is none
