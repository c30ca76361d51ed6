"""Entry points for users: command-line arguments, registration, the launcher and layer specs."""
