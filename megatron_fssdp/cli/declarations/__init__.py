"""The arguments and options of every command. A command's code is imported when it runs."""
