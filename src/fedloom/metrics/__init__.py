"""What the scores of many clients say together."""
