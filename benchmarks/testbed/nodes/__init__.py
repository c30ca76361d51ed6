"""Network namespaces that stand for nodes: their links, and the processes in them."""
