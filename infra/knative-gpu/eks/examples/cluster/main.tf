# A cluster in its own network with one A10G node and a role that reads the models, up to the first answer.

terraform {
  required_version = ">= 1.9"
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.100, < 7"
    }
  }
}

variable "name" {
  description = "What the cluster and all around it are called."
  type        = string
  default     = "remora"
}

variable "image_repository" {
  description = "The repository of the image cuda13 of `remora image build`, without tag."
  type        = string
}

variable "image_tag" {
  description = "The tag of the image."
  type        = string
  default     = "cuda13"
}

variable "bucket" {
  description = "The bucket with the model repository, in the folder models."
  type        = string
  default     = "example-models"
}

variable "domain" {
  description = "The domain of Knative's services: EKS gives no IP address that could stand in for one."
  type        = string
  default     = "example.com"
}

data "aws_availability_zones" "available" {
  state = "available"
}

data "aws_region" "current" {}

locals {
  zones = slice(data.aws_availability_zones.available.names, 0, 2)
  tags  = { application = var.name }
}

resource "aws_vpc" "this" {
  cidr_block           = "10.0.0.0/16"
  enable_dns_hostnames = true
  tags                 = merge(local.tags, { Name = var.name })
}

resource "aws_internet_gateway" "this" {
  vpc_id = aws_vpc.this.id
  tags   = local.tags
}

resource "aws_route_table" "public" {
  vpc_id = aws_vpc.this.id
  tags   = local.tags
  route {
    cidr_block = "0.0.0.0/0"
    gateway_id = aws_internet_gateway.this.id
  }
}

# Public, without a NAT gateway, which would cost more than the small nodes.
resource "aws_subnet" "public" {
  count                   = 2
  vpc_id                  = aws_vpc.this.id
  cidr_block              = cidrsubnet(aws_vpc.this.cidr_block, 4, count.index)
  availability_zone       = local.zones[count.index]
  map_public_ip_on_launch = true
  tags                    = merge(local.tags, { "kubernetes.io/role/elb" = "1" })
}

resource "aws_route_table_association" "public" {
  count          = 2
  subnet_id      = aws_subnet.public[count.index].id
  route_table_id = aws_route_table.public.id
}

resource "aws_iam_role" "this" {
  for_each    = { cluster = "eks.amazonaws.com", node = "ec2.amazonaws.com" }
  name_prefix = "${var.name}-${each.key}-"
  tags        = local.tags
  assume_role_policy = jsonencode({
    Version   = "2012-10-17"
    Statement = [{ Effect = "Allow", Action = "sts:AssumeRole", Principal = { Service = each.value } }]
  })
}

resource "aws_iam_role_policy_attachment" "this" {
  for_each = {
    AmazonEKSClusterPolicy             = "cluster"
    AmazonEKSWorkerNodePolicy          = "node"
    AmazonEKS_CNI_Policy               = "node"
    AmazonEC2ContainerRegistryReadOnly = "node"
  }
  role       = aws_iam_role.this[each.value].name
  policy_arn = "arn:aws:iam::aws:policy/${each.key}"
}

resource "aws_eks_cluster" "this" {
  name     = var.name
  role_arn = aws_iam_role.this["cluster"].arn
  tags     = local.tags

  access_config {
    authentication_mode                         = "API"
    bootstrap_cluster_creator_admin_permissions = true
  }
  vpc_config {
    subnet_ids = aws_subnet.public[*].id
  }
  depends_on = [aws_iam_role_policy_attachment.this, aws_route_table_association.public]
}

resource "aws_eks_node_group" "system" {
  cluster_name    = aws_eks_cluster.this.name
  node_group_name = "system"
  node_role_arn   = aws_iam_role.this["node"].arn
  subnet_ids      = aws_subnet.public[*].id
  instance_types  = ["m7i.large"]
  tags            = local.tags
  scaling_config {
    min_size     = 2
    max_size     = 2
    desired_size = 2
  }
  depends_on = [aws_iam_role_policy_attachment.this]
}

# One node that stays: going down to none takes the cluster autoscaler, which is not part of this example.
module "gpu" {
  source       = "../.."
  cluster_name = aws_eks_cluster.this.name
  subnet_ids   = aws_subnet.public[*].id
  nodes        = { min = 1, max = 1 }
  tags         = local.tags
}

resource "aws_eks_addon" "pod_identity" {
  cluster_name = aws_eks_cluster.this.name
  addon_name   = "eks-pod-identity-agent"
  tags         = local.tags
}

resource "aws_iam_role" "reader" {
  name_prefix = "${var.name}-reader-"
  tags        = local.tags
  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = ["sts:AssumeRole", "sts:TagSession"]
      Principal = { Service = "pods.eks.amazonaws.com" }
    }]
  })
}

resource "aws_iam_role_policy" "reader" {
  name = "models"
  role = aws_iam_role.reader.id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      { Effect = "Allow", Action = ["s3:GetObject"], Resource = ["arn:aws:s3:::${var.bucket}/models/*"] },
      { Effect = "Allow", Action = ["s3:ListBucket"], Resource = ["arn:aws:s3:::${var.bucket}"] },
    ]
  })
}

resource "aws_eks_pod_identity_association" "reader" {
  cluster_name    = aws_eks_cluster.this.name
  namespace       = "default"
  service_account = "remora"
  role_arn        = aws_iam_role.reader.arn
  tags            = local.tags
}

output "next" {
  description = "The commands that are left, from the root of the repository: the last one asks the model."
  value = [
    "aws eks update-kubeconfig --name ${aws_eks_cluster.this.name} --region ${data.aws_region.current.id}",
    "DOMAIN=${var.domain} infra/knative-gpu/install.sh",
    "helm install remora infra/helm/remora --set gpu.count=1 --set replicas=1 --set image.repository=${var.image_repository} --set image.tag=${var.image_tag} --set models.uri=s3://${var.bucket}/models --set networkPolicy.metadataServer=eks --wait --timeout=20m",
    "kubectl port-forward service/remora 8000:8000 &",
    "curl localhost:8000/v2/models/digits/infer --json @request.json",
  ]
  depends_on = [module.gpu, aws_eks_node_group.system, aws_eks_pod_identity_association.reader, aws_eks_addon.pod_identity]
}
