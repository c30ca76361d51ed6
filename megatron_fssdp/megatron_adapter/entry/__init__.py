"""Where users come in: command-line arguments, registration, the launcher and layer specs."""
