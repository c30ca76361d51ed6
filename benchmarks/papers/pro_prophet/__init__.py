"""Rows of Pro-Prophet: the statements of its text, the cells of its tables, and its equations."""
