"""Training scripts that the command line starts.

They have their own folder, which becomes ``sys.path[0]``.
"""
