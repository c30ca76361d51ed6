"""Rows of Parm: the statements of its text, its layers, models, tables and testbeds."""
