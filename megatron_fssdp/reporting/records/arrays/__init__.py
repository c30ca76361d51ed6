"""The ``.npy`` files of a run, which grow by one entry for each iteration, and their readers."""
