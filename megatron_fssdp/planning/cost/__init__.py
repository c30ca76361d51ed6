"""How many seconds links, expert compute and transfers take, by measured or described costs."""
