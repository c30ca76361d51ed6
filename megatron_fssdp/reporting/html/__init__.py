"""What every HTML page is made of: its frame, sections, figures and style."""
