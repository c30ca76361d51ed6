"""Training scripts that the command line starts; a folder of their own, since it becomes `sys.path[0]`."""
