"""Request router: sends each request to the replica that is predicted to answer first, and holds it while none can."""
