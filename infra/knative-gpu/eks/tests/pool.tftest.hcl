# The pool goes down to nothing and comes back.

mock_provider "aws" {
  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }
  mock_data "aws_availability_zones" {
    defaults = { names = ["eu-west-1a", "eu-west-1b", "eu-west-1c"] }
  }
  mock_resource "aws_iam_role" {
    defaults = { arn = "arn:aws:iam::111122223333:role/node" }
  }
  mock_resource "aws_eks_node_group" {
    defaults = { resources = [{ autoscaling_groups = [{ name = "eks-gpu" }], remote_access_security_group_id = "" }] }
  }
}

variables {
  cluster_name = "example"
  subnet_ids   = ["subnet-0example"]
}

run "nothing_but_gpu_work_lands_there" {
  command = apply
  assert {
    condition     = one(aws_eks_node_group.this.taint).key == "nvidia.com/gpu" && one(aws_eks_node_group.this.taint).effect == "NO_SCHEDULE"
    error_message = "the nodes are tainted"
  }
  assert {
    condition     = aws_eks_node_group.this.scaling_config[0].min_size == 0
    error_message = "no node while no pod asks"
  }
  assert {
    condition     = toset([for key in keys(aws_autoscaling_group_tag.hints) : trimprefix(key, "k8s.io/cluster-autoscaler/node-template/")]) == toset(["taint/nvidia.com/gpu", "label/remora.dev/pool"])
    error_message = "from nothing the autoscaler needs its hints; the GPUs of an instance type it knows, and a tag would say less of the large ones"
  }
}

run "simple" {
  command = plan
  module {
    source = "./examples/simple"
  }
}

run "a_role_that_is_there_is_taken" {
  command = plan
  variables {
    role_arn = "arn:aws:iam::111122223333:role/organisation"
  }
  assert {
    condition     = length(aws_iam_role.node) == 0 && length(aws_iam_role_policy_attachment.node) == 0 && aws_eks_node_group.this.node_role_arn == "arn:aws:iam::111122223333:role/organisation"
    error_message = "no role beside the one that is named"
  }
}

run "a_role_made_here_keeps_within_the_boundary" {
  command = plan
  variables {
    permissions_boundary_arn = "arn:aws:iam::111122223333:policy/boundary"
  }
  assert {
    condition     = aws_iam_role.node[0].permissions_boundary == "arn:aws:iam::111122223333:policy/boundary"
    error_message = "organisations refuse a role without its boundary"
  }
}

run "cluster" {
  command = plan
  variables {
    image_repository = "111122223333.dkr.ecr.eu-west-1.amazonaws.com/remora"
  }
  module {
    source = "./examples/cluster"
  }
}
