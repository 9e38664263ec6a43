"""The networks of a deployment: what it is made of, what its hosts and switches are to be told, and whether they are so."""
