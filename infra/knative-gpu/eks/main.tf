# GPU nodes for an EKS cluster: tainted, so that nothing else lands there, and none of them while no pod asks.

data "aws_partition" "current" {}

locals {
  role_arn = var.role_arn != null ? var.role_arn : aws_iam_role.node[0].arn
  policies = ["AmazonEKSWorkerNodePolicy", "AmazonEKS_CNI_Policy", "AmazonEC2ContainerRegistryReadOnly"]
  # From no nodes at all the autoscaler knows a node's taint and label from these tags alone. How many GPUs it has follows
  # from the instance type, and a tag would overrule that.
  hints = {
    "k8s.io/cluster-autoscaler/node-template/taint/nvidia.com/gpu"  = "present:NoSchedule"
    "k8s.io/cluster-autoscaler/node-template/label/remora.dev/pool" = var.name
  }
}

resource "aws_iam_role" "node" {
  count                = var.role_arn == null ? 1 : 0
  name_prefix          = "${substr("${var.cluster_name}-${var.name}", 0, 30)}-"
  permissions_boundary = var.permissions_boundary_arn
  tags                 = var.tags
  assume_role_policy = jsonencode({
    Version   = "2012-10-17"
    Statement = [{ Effect = "Allow", Action = "sts:AssumeRole", Principal = { Service = "ec2.amazonaws.com" } }]
  })
}

resource "aws_iam_role_policy_attachment" "node" {
  for_each   = var.role_arn == null ? toset(local.policies) : toset([])
  role       = aws_iam_role.node[0].name
  policy_arn = "arn:${data.aws_partition.current.partition}:iam::aws:policy/${each.value}"
}

moved {
  from = aws_iam_role.node
  to   = aws_iam_role.node[0]
}

resource "aws_eks_node_group" "this" {
  cluster_name    = var.cluster_name
  node_group_name = var.name
  node_role_arn   = local.role_arn
  subnet_ids      = var.subnet_ids
  ami_type        = "AL2023_x86_64_NVIDIA"
  capacity_type   = var.spot ? "SPOT" : "ON_DEMAND"
  instance_types  = var.instance_types
  disk_size       = var.disk_gib
  labels          = { "remora.dev/pool" = var.name }
  tags            = var.tags

  scaling_config {
    min_size     = var.nodes.min
    max_size     = var.nodes.max
    desired_size = var.nodes.min
  }
  taint {
    key    = "nvidia.com/gpu"
    value  = "present"
    effect = "NO_SCHEDULE"
  }
  update_config {
    max_unavailable = 1
  }

  lifecycle {
    # The autoscaler owns the count.
    ignore_changes = [scaling_config[0].desired_size]
  }
  depends_on = [aws_iam_role_policy_attachment.node]
}

resource "aws_autoscaling_group_tag" "hints" {
  for_each               = local.hints
  autoscaling_group_name = aws_eks_node_group.this.resources[0].autoscaling_groups[0].name
  tag {
    key                 = each.key
    value               = each.value
    propagate_at_launch = false
  }
}
