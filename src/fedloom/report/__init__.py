"""What results look like: tables and pictures."""
