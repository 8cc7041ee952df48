"""A local web page to try a model: the experts behind each token, the surprisal of each token, and continuations."""
