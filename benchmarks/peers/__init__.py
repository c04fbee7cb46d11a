"""What the gateway is measured with and against: two small tool servers, and gateways in environments of their own."""
