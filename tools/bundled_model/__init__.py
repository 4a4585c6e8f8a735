"""Training of the bundled model: the corpus, the run, and what is made of it."""
