"""The application on top of the library: models, data, reports and the command line."""
