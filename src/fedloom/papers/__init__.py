"""The experiments of the papers as configurations, and the numbers that the papers print."""
