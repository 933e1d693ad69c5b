"""HTTP for the services: routes as data, one dispatcher, problem documents, OpenAPI from the same data."""
