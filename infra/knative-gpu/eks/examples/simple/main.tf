# Up to four A10G nodes, none while idle.

terraform {
  required_version = ">= 1.9"
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.100, < 7"
    }
  }
}

module "gpu" {
  source       = "../.."
  cluster_name = "example"
  subnet_ids   = ["subnet-0example"]
}
