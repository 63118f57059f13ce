// Softmax attention in float32 with grouped heads and `causal`, for tests of `qkv verify --exec`.
// One pass over the keys keeps a running maximum. A third argument names a bug to plant.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <limits>
#include <set>
#include <string>
#include <vector>

struct Tensor {
    std::vector<size_t> shape;
    std::vector<float> numbers;
};

// The oracle runs no case that exits with 77.
[[noreturn]] void refuse(const std::string& reason) {
    std::cerr << reason << "\n";
    std::exit(77);
}

std::vector<size_t> integers(const std::string& entry, const std::string& field) {
    std::vector<size_t> found;
    const char* next = entry.c_str() + entry.find("\"" + field + "\":[") + field.size() + 3;
    for (char* end; *next != ']'; next = end) found.push_back(std::strtoull(next + 1, &end, 10));
    return found;
}

// The header is JSON without spaces. In the metadata a quote has a backslash before it.
Tensor read_tensor(const std::string& header, const char* data, const std::string& name) {
    const size_t first = header.find("\"" + name + "\":{");
    const std::string entry = header.substr(first, header.find('}', first) - first);
    if (entry.find("\"dtype\":\"F32\"") == std::string::npos) refuse("float32 only");
    Tensor tensor{integers(entry, "shape"), {}};
    const std::vector<size_t> bytes = integers(entry, "data_offsets");
    tensor.numbers.resize((bytes[1] - bytes[0]) / sizeof(float));
    std::memcpy(tensor.numbers.data(), data + bytes[0], bytes[1] - bytes[0]);
    return tensor;
}

void attend_row(const float* query, const float* key, const float* value, float* output,
                size_t keys, size_t D, size_t E, float scale, bool divides) {
    float largest = -std::numeric_limits<float>::infinity(), total = 0;
    std::fill(output, output + E, 0.0f);
    for (size_t j = 0; j < keys; ++j) {
        float score = 0;
        for (size_t d = 0; d < D; ++d) score += query[d] * key[j * D + d];
        score *= scale;
        const float next = std::max(largest, score);
        const float shrink = std::exp(largest - next), weight = std::exp(score - next);
        for (size_t e = 0; e < E; ++e)
            output[e] = output[e] * shrink + weight * value[j * E + e];
        total = total * shrink + weight;
        largest = next;
    }
    for (size_t e = 0; divides && e < E; ++e) output[e] /= total;
}

void write_output(const char* path, const Tensor& output) {
    std::string shape;
    for (size_t size : output.shape) shape += (shape.empty() ? "" : ",") + std::to_string(size);
    const uint64_t bytes = output.numbers.size() * sizeof(float);
    const std::string header = "{\"output\":{\"dtype\":\"F32\",\"shape\":[" + shape +
                               "],\"data_offsets\":[0," + std::to_string(bytes) + "]}}";
    const uint64_t length = header.size();
    std::ofstream file(path, std::ios::binary);
    file.write(reinterpret_cast<const char*>(&length), sizeof length);
    file << header;
    file.write(reinterpret_cast<const char*>(output.numbers.data()), bytes);
}

int main(int count, char** words) {
    std::ifstream file(words[1], std::ios::binary);
    const std::string content{std::istreambuf_iterator<char>(file), {}};
    const std::string bug = count > 3 ? words[3] : "";
    const std::set<std::string> bugs{"", "scale-missing", "causal-off-by-one", "normalizer-missing"};
    if (!bugs.count(bug)) {
        std::cerr << "no bug " << bug << std::endl;
        return 2;
    }
    uint64_t length;
    std::memcpy(&length, content.data(), sizeof length);
    const std::string header = content.substr(8, length);
    for (const std::string name : {"mask", "key_lengths", "sinks"})
        if (header.find("\"" + name + "\":{") != std::string::npos) refuse("no " + name);
    const bool causal = header.find("\\\"causal\\\":true") != std::string::npos;

    const char* data = content.data() + 8 + length;
    const Tensor query = read_tensor(header, data, "query");
    const Tensor key = read_tensor(header, data, "key"), value = read_tensor(header, data, "value");
    const size_t B = query.shape[0], H = query.shape[1], L = query.shape[2], D = query.shape[3];
    const size_t G = key.shape[1], S = key.shape[2], E = value.shape[3];
    const float scale = bug == "scale-missing" ? 1.0f : 1.0f / std::sqrt(float(D));
    const size_t shift = bug == "causal-off-by-one" ? 2 : 1;
    Tensor output{{B, H, L, E}, std::vector<float>(B * H * L * E)};
    for (size_t row = 0; row < B * H * L; ++row) {
        const size_t b = row / (H * L), h = row / L % H, i = row % L, plane = b * G + h / (H / G);
        attend_row(&query.numbers[row * D], &key.numbers[plane * S * D],
                   &value.numbers[plane * S * E], &output.numbers[row * E],
                   causal ? std::min(S, i + shift) : S, D, E, scale, bug != "normalizer-missing");
    }
    write_output(words[2], output);
}
