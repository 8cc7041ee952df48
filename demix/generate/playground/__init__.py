"""A local page on which to try a model: whose words a text is made of, how surprising each is, what could follow."""
