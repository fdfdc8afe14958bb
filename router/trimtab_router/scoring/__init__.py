"""Pure scoring: which replica is predicted to answer a request first. Shared by the router and the simulator."""
