"""The execution of plans: layer executors, iterations, measurements and the model's runtime."""
