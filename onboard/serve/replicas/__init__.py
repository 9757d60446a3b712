"""One model served by several replicas: requests are sent on, and sent again where one is lost."""
