"""Where experts are: devices and nodes, owners, replicas, and tables that follow from them."""
