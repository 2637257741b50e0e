"""The data process of a node: started when a rank asks for it, kept, and ended with the job."""
