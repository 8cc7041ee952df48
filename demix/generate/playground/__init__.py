"""A local web page to try a model: the experts behind each token, the bits of each token, and continuations."""
