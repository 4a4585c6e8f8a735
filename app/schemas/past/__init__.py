"""Makes the history of a request readable: what a model that reads text cannot take is converted, named or left out."""
