"""HTTP/1.1 and HTTP/2 connections and the services that answer them."""
