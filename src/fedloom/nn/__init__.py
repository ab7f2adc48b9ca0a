"""Models as pure functions of their parameters, and layers that many clients run at once."""
