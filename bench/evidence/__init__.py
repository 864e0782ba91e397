"""Evidence for maintainers: what the claims of the documents rest on."""
